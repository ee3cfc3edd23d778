"""What verbs do beyond one function; torch is imported by those files alone that need it."""

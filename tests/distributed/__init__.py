"""Real process groups: several processes must equal one."""

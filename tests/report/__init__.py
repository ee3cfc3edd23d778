"""A package, so that its tests can share how runs are made up."""

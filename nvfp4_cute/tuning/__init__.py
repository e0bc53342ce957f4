"""Times configs and stores the best."""

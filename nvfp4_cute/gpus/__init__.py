"""What each GPU is and what has run on it."""

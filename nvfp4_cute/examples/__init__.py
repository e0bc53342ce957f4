"""Short programs that show one task each; every one of them is run by a test."""

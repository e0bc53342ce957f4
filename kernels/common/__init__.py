"""Device pieces that every architecture shares."""

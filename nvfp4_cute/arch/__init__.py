"""One module per architecture: candidate configs, derived sizes, and the reasons for a refusal."""

"""Block-scaled number formats: codecs, scale layouts, tensors."""

"""Speed of light, weight footprints, modelled times, and their plots."""

"""Speed of light, footprints, modelled times, pictures."""

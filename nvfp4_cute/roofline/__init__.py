"""Speed of light, weight footprints, modelled times, and pictures of them."""

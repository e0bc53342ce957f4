"""Modelled times: the events that an emulator recorded, replayed on all SMs of a GPU at once."""

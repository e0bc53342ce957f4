"""Modelled times: replays the events that an emulator recorded, on all SMs of a GPU at once."""

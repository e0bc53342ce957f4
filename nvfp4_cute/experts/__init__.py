"""Layers of experts: routing, sorting rows by expert, the operations between the two products, and the whole layer."""

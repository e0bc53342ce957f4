"""Layers of experts: routing, the order of rows, what is done to rows between the two products, and the whole layer."""

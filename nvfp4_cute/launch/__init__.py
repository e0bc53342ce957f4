"""Turns checked problems into launches: plans, prepared calls, workspaces, tuned configs."""

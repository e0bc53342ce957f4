"""From a checked problem to a launch: plan, prepared call, workspace, tuned configurations."""

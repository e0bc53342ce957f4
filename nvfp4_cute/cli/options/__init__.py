"""Options of the verbs, one module each. Importing one imports neither torch nor the verb's code."""

"""Options of the verbs, a module each: importing one imports neither torch nor what the verb does."""

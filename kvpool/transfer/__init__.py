"""One load: the state machine (`machine`, pure) and the shell that carries it out (`loader`)."""

"""The command line: one module a command; `main` finds the ranks and runs it on them."""

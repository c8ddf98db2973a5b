"""What people see: verdicts, the board, hints, fresh stubs."""

"""One experiment a file. Each has ORDER, TITLE, QUESTION, SECONDS, CLAIMS and run(lab)."""

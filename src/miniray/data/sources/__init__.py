"""One module per file format. Sources read blocks of rows and have no notion of ranks."""

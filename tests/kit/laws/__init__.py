"""What specs are written with: checks, drawn inputs, small models."""

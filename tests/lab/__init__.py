"""The lab: what five articles claim, measured with the references and drawn."""

"""The lab: what five articles claim, measured with the references and drawn."""

import os

# Threads that wait sleep: spinning, they take the processor from those who work. torch reads it
# when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models come from configurations

"""What the workers of an attempt are told and leave behind, on this machine or on many nodes; plain processes too."""

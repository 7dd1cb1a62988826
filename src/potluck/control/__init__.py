"""The controller: what the Brain wants of the fleet is compared with what runs, and carried out by launchers."""

"""`make demo`: a day that is played on a service of this machine, and told on its page."""

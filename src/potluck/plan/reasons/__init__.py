"""Why a plan is as it is: what binds, what a term costs, what nothing on offer can serve."""

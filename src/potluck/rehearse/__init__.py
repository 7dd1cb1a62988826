"""Plans tried in simulation before money is spent on them: `loop.rehearse` is the way in."""

"""Providers of step times behind the face of `perf.step`: roofline, pipelines of them, profiles, a closed form."""

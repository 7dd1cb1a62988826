"""Measuring engines: how long steps of many shapes take, in this process or over HTTP."""

"""From step times to what is served: phases, rates within an objective, what a client sees."""

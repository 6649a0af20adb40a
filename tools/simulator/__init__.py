"""A discrete-event simulator that drives a lane's real schedulers, one a rank, in one process."""

"""The process in its job: which worker it is, its settings and interfaces, what it tells the launcher, how it ends."""

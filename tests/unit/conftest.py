from hypothesis import settings

# The same examples in every run, and no time limit for one of them: a busy machine is no reason to fail.
settings.register_profile("unit", deadline=None, derandomize=True)
settings.load_profile("unit")

from hypothesis import settings

import nightly

# The same examples in every run, and no time limit for one of them: a busy machine is no reason to fail.
settings.register_profile("unit", deadline=None, derandomize=True, max_examples=30)
# Other examples every night, and many of them.
settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("nightly" if nightly.IS_NIGHT else "unit")

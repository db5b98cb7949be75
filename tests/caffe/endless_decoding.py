"""A program that ends while its threads decode images as fast as they can."""

from itertools import count

import numpy as np

from poseidon.caffe.io.images import decode_image, encode_image
from poseidon.caffe.io.prefetch import Prefetcher

CONTENT = encode_image(np.random.default_rng(1).integers(0, 255, (600, 600, 3)).astype(np.uint8), "jpg")


class Decoded:
    def parts(self):
        for _ in range(1000):
            yield lambda: decode_image(CONTENT)

    def finish(self):
        return None


class Small(Decoded):
    def parts(self):
        yield lambda: decode_image(CONTENT)


ahead = Prefetcher((Small() if number == 0 else Decoded() for number in count()), 4, "test", 3)
next(ahead)
print("leaving")

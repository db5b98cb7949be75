"""Where data layers and tools get their data: databases, lists, images, transformation, prefetching, sharding."""

"""The parameter server: who owns which values, how they add up, and who may read them when.

Everything that decides is pure and knows neither sockets nor threads nor PyTorch: ``chunks`` cuts units into
chunks and gives them owners, ``shard`` sums chunks in rank order, ``clocks`` bounds how far workers drift apart,
``tables`` holds rows under that bound. ``service`` ties a shard to a transport.
"""

"""Caffe's command-line tools as functions; ``poseidon.caffe.commands`` has their options."""

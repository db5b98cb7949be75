"""What Caffe's command-line tools do, as functions; ``poseidon.launch`` has their options."""

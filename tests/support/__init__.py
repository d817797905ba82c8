"""What tests of several rooms share: servers, clusters, waiting, faults and kill points."""

"""Weight sync: transport, buckets and checks."""

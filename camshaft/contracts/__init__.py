"""Contract suites: what every engine, rollout and controller backend must hold, as a library."""

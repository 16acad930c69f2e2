"""Pipeline parallelism: schedules as data, a simulator for them, and the executor. Importing this loads no torch."""

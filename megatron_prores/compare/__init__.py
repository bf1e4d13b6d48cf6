"""Training runs that differ in named settings only, and a report of what differs in their results.

`arms` says what is compared, `runs` how one run is trained and measured, `pool` trains them all, `results` reads what
they left, `statistics` says what is noise, `figures` and `page` show it.
"""

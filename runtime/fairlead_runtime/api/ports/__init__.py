"""The two ports and what each serves: applications, probes, drain, the admin's routes, the page."""

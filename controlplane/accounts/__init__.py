"""How users sign in: passwords and guessing limits, second factors, single sign-on, sessions.

django-allauth does the work; these modules hold the decisions that are specific to Warmpath.
"""

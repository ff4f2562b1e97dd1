"""How people sign in: ``passwords``, ``second_factor``, and what holds back who guesses, ``throttle``.

django-allauth does the work; here stand the decisions that are ours.
"""

"""Signing in and out, and changing one's password. No sign-up and no mail: an operator is added by another."""

from allauth.account import views
from django.urls import path

urlpatterns = [
    path("login/", views.login, name="account_login"),
    path("logout/", views.logout, name="account_logout"),
    path("inactive/", views.account_inactive, name="account_inactive"),
    path("password/change/", views.password_change, name="account_change_password"),
]

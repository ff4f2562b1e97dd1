"""Roles that groups at an identity provider bring stand beside those that admins gave."""


from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('controlplane', '0010_sources'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.RemoveConstraint(
            model_name='roleassignment',
            name='one_role_per_project',
        ),
        migrations.AddField(
            model_name='roleassignment',
            name='from_groups',
            field=models.BooleanField(db_default=False, default=False),
        ),
        migrations.AddConstraint(
            model_name='roleassignment',
            constraint=models.UniqueConstraint(fields=('user', 'project', 'from_groups'), name='one_role_per_project', nulls_distinct=False),
        ),
    ]

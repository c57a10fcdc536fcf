-- needs: session
local found, member = whole_record(), redis.call('HGET', base, 'member')
local tokens = redis.call('HGETALL', base .. ':u')
if found then
    delete()
end
return { member, found, tokens }

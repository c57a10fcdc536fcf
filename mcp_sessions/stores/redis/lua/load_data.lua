-- needs: session
if redis.call('EXISTS', base) == 0 then
    return false
end
return { redis.call('HGET', base, 'datav'), redis.call('GET', base .. ':d') }
